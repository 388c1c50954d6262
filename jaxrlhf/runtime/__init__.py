"""Process settings: environment before JAX starts, compiled programs kept between runs, return of freed memory,
checksums of files."""
