"""Split training: a model cut in two, micro-batches pipelined between a device and a split service."""
