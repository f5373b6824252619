"""Jobs, clusters, configurations, validity rules and search spaces.

This package imports the standard library only. A study starts from:

    job, cluster = load_job("qwen2.5-7b"), load_cluster("h100-32")
    candidates = load_space("full").candidates(job, cluster)
"""

from tuner.search_spaces.cluster import Cluster, Device, load_cluster, load_device
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.search_spaces.space import Candidates, SearchSpace, default_configuration, load_space

__all__ = [
    "Candidates",
    "Cluster",
    "Configuration",
    "Device",
    "InputError",
    "SearchSpace",
    "Settings",
    "TrainingJob",
    "default_configuration",
    "load_cluster",
    "load_device",
    "load_job",
    "load_space",
]
