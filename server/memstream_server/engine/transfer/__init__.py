"""Export and import: memories and conversations as JSON lines (docs/export.md)."""
