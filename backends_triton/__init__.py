"""What both vendors' backends share: wrappers around the portable Triton kernels and around torch (docs/adr/0007)."""
