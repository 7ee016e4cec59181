"""The native CPU library in C++, and its Python bindings."""
