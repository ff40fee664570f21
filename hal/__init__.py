"""The hardware abstraction layer: contracts, devices and the choice of kernels. Imports only the standard library."""
