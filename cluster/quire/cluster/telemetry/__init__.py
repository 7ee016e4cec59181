"""What a gateway tells of itself: metrics, and explanations of its decisions."""
