"""Admission: which requests go to groups, which wait at the gateway, and which are refused."""
