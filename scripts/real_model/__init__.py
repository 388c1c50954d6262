"""Claims of this project measured on a real chat model; `python -m scripts.real_model` measures them."""
