"""The search over placements and layouts."""
