"""Agent programs of other frameworks, as a run trains them."""
