"""The composition root: settings in, a running server out. The only package that knows every part by name."""
