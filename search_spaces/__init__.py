"""What can be chosen: the job, the cluster, the configuration, the rules and the spaces.

The leftmost room: facts and choices only, on the standard library alone. A study starts here:

    job, cluster = load_job("qwen2.5-7b"), load_cluster("h100-32")
    candidates = load_space("full").candidates(job, cluster)
"""

from search_spaces.cluster import Cluster, Device, load_cluster, load_device
from search_spaces.configuration import Configuration, Settings
from search_spaces.errors import InputError
from search_spaces.job import TrainingJob, load_job
from search_spaces.space import Candidates, SearchSpace, default_configuration, load_space

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
