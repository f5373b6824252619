import os

_group = []


def is_available():
    return True


def is_initialized():
    return bool(_group)


def init_process_group(backend="gloo", rank=None, world_size=None):
    own = os.environ.get("RANK", 0), os.environ.get("WORLD_SIZE", 1)
    _group[:] = (rank, world_size) if rank is not None else map(int, own)


def get_rank():
    return _group[0]


def get_world_size():
    return _group[1]
