"""Parts of the benchmark `pipeline`: what its steps cost, who is compared, real and virtual time, results."""
