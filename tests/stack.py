"""Libraries, adapters and commands that the server of `tests.processes` imports once."""

import copy
import functools
import gc
import importlib.metadata
import secrets
import types
from pathlib import Path

# Looking at a million objects again and again that live as long as the process costs 1.3 s of 8.
gc.disable()

import datasets.fingerprint  # noqa: E402
import deepspeed  # noqa: E402
import PIL.Image  # noqa: E402
import torch  # noqa: E402
from accelerate.utils import imports  # noqa: E402
from swift.model import model_meta  # noqa: E402
from transformers.configuration_utils import PreTrainedConfig  # noqa: E402
from transformers.conversion_mapping import get_checkpoint_conversion_mapping  # noqa: E402
from transformers.models.auto.video_processing_auto import video_processor_class_from_name  # noqa: E402

from packplan.adapters.samples import arguments  # noqa: E402

# What the commands and the libraries import when they first need it.
for module in (
    "packplan.app.sft.train", "packplan.adapters.trainer.equality", "packplan.adapters.ranks.ray",
    "swift.pipelines.train.tuner", "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "deepspeed.runtime.zero.muon.original_muon",  # which brings torch's compiler, for 2 s in each rank
    "torch.utils.serialization", "transformers.models.qwen2_5_vl.processing_qwen2_5_vl",
    "transformers.models.qwen2_vl.image_processing_qwen2_vl", "transformers.models.qwen3_vl.processing_qwen3_vl",
):  # fmt: skip
    importlib.import_module(module)
for family in ("qwen2", "qwen2_5_vl", "qwen3", "qwen3_vl", "qwen3_vl_moe"):
    importlib.import_module(f"transformers.models.{family}.modeling_{family}")
for name in ("Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"):
    video_processor_class_from_name(name)
PIL.Image.init()
# It would compile an extension for two minutes, once on each machine; gloo does the same.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# ms-swift compares a model's name with all that it knows: a twentieth of a run's time.
matched = functools.cache(model_meta.get_matched_model_meta)
arguments.get_matched_model_meta = model_meta.get_matched_model_meta = matched
# It reads each value of a model's configuration, for each object of arguments: a tenth of a run.
read_info = model_meta._get_model_info
info_of = functools.cache(lambda _, *given: read_info(*given, None))
model_meta._get_model_info = lambda folder, kind, quantization_config: (
    read_info(folder, kind, quantization_config)
    if quantization_config
    else copy.deepcopy(info_of((*map(Path.read_bytes, sorted(Path(folder).glob("*.json"))),), folder, kind))
)
# It looks up versions for each model that it opens: another thirtieth.
importlib.metadata.version = functools.cache(importlib.metadata.version)
imports._is_package_available = functools.cache(imports._is_package_available)
# transformers writes each configuration out, for a log that is off: an eighth of a run's time.
PreTrainedConfig.__repr__ = object.__repr__
# A pool for each map takes a third of a run, and its fork would wait for threads of others.
mapped = datasets.Dataset.map
datasets.Dataset.map = lambda *args, **options: mapped(*args, **options | {"num_proc": None})
# datasets pickles each tokenizer, to name a file that no other run reads: a fifteenth of a run.
datasets.fingerprint.update_fingerprint = datasets.arrow_dataset.update_fingerprint = lambda *_: secrets.token_hex(8)
# Of each seed, torch keeps the stack for devices that are not there: a twentieth of a run.
for device in (torch.cuda, torch.mtia, torch.xpu):
    device.traceback = types.SimpleNamespace(format_stack=list)
# Compiles 700 expressions, once in a process that loads or saves a model.
get_checkpoint_conversion_mapping("qwen2")

# Trainers collect garbage at each start, and would look at all of them too.
gc.freeze()
gc.enable()
