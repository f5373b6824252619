"""A stand-in for torch that is imported at once: what the hook watches, without computing."""

import mmap
import os
import sys
import types

from . import distributed  # noqa: F401

__version__ = "0.small"
with open(os.path.join(os.path.dirname(__file__), "libtorch_small.so"), "rb") as _file:
    library = mmap.mmap(_file.fileno(), 0, prot=mmap.PROT_READ)  # as torch's library is loaded


def _module(name, **members):
    module = types.ModuleType(f"torch.{name}")
    vars(module).update(members)
    sys.modules[module.__name__] = module
    owner, _, last = module.__name__.rpartition(".")
    setattr(sys.modules[owner], last, module)
    return module


class Module:
    def __call__(self, batch):
        return batch

    def parameters(self):
        return []

    modules = parameters

    def zero_grad(self, set_to_none=True):
        pass


class _BatchNorm(Module):
    training = False


class _ConvNd(Module):
    pass


class GradScaler:
    def is_enabled(self):
        return False

    def step(self, optimizer):
        optimizer.step()


class _BaseDataLoaderIter:
    def _next_index(self):
        return []

    def _reset(self):
        pass

    def __next__(self):
        raise StopIteration


hooks = []


class Optimizer:
    def zero_grad(self, set_to_none=True):
        pass


class SGD(Optimizer):
    """Takes the steps of a training that never converges."""

    def __init__(self):
        self.param_groups = [{"params": [], "lr": 0.1}]

    def step(self):
        for hook in hooks:
            hook(self, (), {})


class Tensor:
    """A batch of a size."""

    dtype = "torch.float32"

    def __init__(self, size):
        self.shape = (size, 4)


def backward(loss=None):
    pass


_module("nn", Module=Module)
_module("nn.modules")
_module("nn.modules.batchnorm", _BatchNorm=_BatchNorm)
_module("nn.modules.conv", _ConvNd=_ConvNd)
_module("backends")
_module("backends.cudnn", benchmark=False, deterministic=False)
_module("autograd", backward=backward)
_module("amp", GradScaler=GradScaler)
_module("compiler", is_compiling=lambda: False)
_module("cuda", is_available=lambda: False)
_module("utils")
_module("utils.data")
_module("utils.data.dataloader", _BaseDataLoaderIter=_BaseDataLoaderIter)
_module("optim", Optimizer=Optimizer, SGD=SGD)
_module("optim.optimizer", register_optimizer_step_post_hook=hooks.append)


def is_grad_enabled():
    return True


def are_deterministic_algorithms_enabled():
    return False


def get_num_threads():
    return int(os.environ.get("OMP_NUM_THREADS", 2))


def manual_seed(seed):
    pass


def save(value, file):
    pass
