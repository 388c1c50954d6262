"""Parts of the residual stream beside attention and the MLP."""
