"""Everything that touches Flower. No other package imports it."""
