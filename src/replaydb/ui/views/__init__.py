"""Views of the web UI, one module per page."""
