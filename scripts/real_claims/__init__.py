"""Claims of this project measured on a real chat model; `scripts/real_model.py` runs them."""
