"""One replica: scheduler, radix cache, block pool, models, sampler, and the service around them."""
