"""Everything that becomes HTML or SVG."""
