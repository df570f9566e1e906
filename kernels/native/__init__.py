"""The compiled CPU path: a whole decoder step in one call (C++ behind a C ABI, built on first use).

Exact by construction: every sum runs over its inner dimension in one order whatever tile it falls
into, attention walks fixed chunks of 64 positions from position 0, and what is masked adds exactly
nothing. So a row's result depends on its own tokens only, bit for bit: not on batch mates, on
chunking, on cache hits or on the block it lies in. Which instructions round is the build's `isa`,
and part of the numeric class. Without a C++ compiler there is the torch path, not invariant.
"""
