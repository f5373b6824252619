"""The GPU path on a twin GPU node, against the node's exact truth."""
