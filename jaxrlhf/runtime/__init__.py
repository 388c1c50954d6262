"""Settings of the process: environment before JAX starts, compiled programs kept between runs, memory given back."""
