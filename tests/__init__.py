"""Tests of the package, laid out as it is; faults/ and fuzz/ are run by benchmarks, too."""
