"""Search over placements and layouts."""
