"""The classes that a recipe may name without ``--allow-code``, and which of their settings.

A recipe is a file that travels: with an adapter, a paper, a message. Whatever it names here is code that ships with
this package or with Lightning and takes plain values; nothing takes a function, a class, or settings that lead to one.
There is no wildcard. ``docs/recipe_safety.md`` says the same to users.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Allowed:
    """What a key of the trainer may name.

    Attributes:
        names: plain words that are no class.
        classes: path -> settings that a recipe may give; every value is a number, a text, true, false or null.
        groups: settings of these names are lists or mappings of such values.
        many: whether the key takes a list of classes.
    """

    names: tuple[str, ...]
    classes: dict[str, tuple[str, ...]]
    groups: tuple[str, ...] = ()
    many: bool = False

    def words(self) -> list[str]:
        """What may be written in one word."""
        return [*self.names, *(path.rpartition(".")[2] for path in self.classes)]

    def path_of(self, name: str) -> str | None:
        """The path of a class that is named in full or by its last word; None where it is not listed."""
        if name in self.classes:
            return name
        return next((path for path in self.classes if path.rpartition(".")[2] == name), None)


_CALLBACKS = "lightning.pytorch.callbacks."
_LOGGERS = "lightning.pytorch.loggers."
_PROFILERS = "lightning.pytorch.profilers."
_ENVIRONMENTS = "lightning.fabric.plugins.environments."
_STRATEGIES = "subtoken_train.training.strategies."
_STOPPING = (
    *("monitor", "min_delta", "patience", "verbose", "mode", "strict", "check_finite", "stopping_threshold"),
    *("divergence_threshold", "check_on_train_epoch_end", "log_rank_zero_only"),
)
_DDP = (
    *("process_group_backend", "start_method", "timeout", "dim", "broadcast_buffers", "init_sync", "bucket_cap_mb"),
    *("find_unused_parameters", "check_reduction", "gradient_as_bucket_view", "static_graph"),
    *("skip_all_reduce_unused_params", "batched_grad_copy"),
)
_WANDB = (
    *("name", "save_dir", "version", "offline", "dir", "id", "anonymous", "project", "log_model", "prefix"),
    *("checkpoint_name", "add_file_policy", "entity", "group", "job_type", "tags", "notes", "mode", "resume"),
)
_MLFLOW = (
    *("experiment_name", "run_name", "tracking_uri", "tags", "save_dir", "log_model", "prefix"),
    *("artifact_location", "run_id", "synchronous"),
)

ALLOWED = {
    "accelerator": Allowed(("auto", "cpu", "gpu", "cuda", "mps", "tpu"), {}),
    "strategy": Allowed(
        ("auto", "ddp", "zero1", "zero2", "zero3", "zero3_offload", "fsdp2"),
        {
            f"{_STRATEGIES}zero.ZeroStrategy": ("stage", "offload", "config"),
            f"{_STRATEGIES}fsdp2.Fsdp2Strategy": (),
            "lightning.pytorch.strategies.DDPStrategy": _DDP,
            "lightning.pytorch.strategies.SingleDeviceStrategy": ("device",),
        },
        groups=("config",),
    ),
    "logger": Allowed(
        (),
        {
            f"{_LOGGERS}CSVLogger": ("save_dir", "name", "version", "prefix", "flush_logs_every_n_steps"),
            f"{_LOGGERS}TensorBoardLogger": (
                *("save_dir", "name", "version", "log_graph", "default_hp_metric", "prefix", "sub_dir"),
                *("comment", "purge_step", "max_queue", "flush_secs", "filename_suffix"),
            ),
            f"{_LOGGERS}WandbLogger": _WANDB,
            f"{_LOGGERS}MLFlowLogger": _MLFLOW,
        },
        groups=("tags",),
        many=True,
    ),
    "callbacks": Allowed(
        (),
        {
            "subtoken_train.training.samples.SampleLog": (),
            f"{_CALLBACKS}DeviceStatsMonitor": ("cpu_stats",),
            f"{_CALLBACKS}EarlyStopping": _STOPPING,
            f"{_CALLBACKS}LearningRateMonitor": ("logging_interval", "log_momentum", "log_weight_decay"),
            f"{_CALLBACKS}ModelSummary": ("max_depth",),
            f"{_CALLBACKS}RichModelSummary": ("max_depth",),
            f"{_CALLBACKS}RichProgressBar": ("refresh_rate", "leave", "theme"),
            f"{_CALLBACKS}TQDMProgressBar": ("refresh_rate", "process_position", "leave"),
        },
        groups=("theme",),
        many=True,
    ),
    "profiler": Allowed(
        ("simple", "advanced", "pytorch"),
        {
            f"{_PROFILERS}SimpleProfiler": ("dirpath", "filename", "extended"),
            f"{_PROFILERS}AdvancedProfiler": ("dirpath", "filename", "line_count_restriction", "dump_stats"),
            f"{_PROFILERS}PassThroughProfiler": ("dirpath", "filename"),
            f"{_PROFILERS}PyTorchProfiler": (
                *("dirpath", "filename", "group_by_input_shapes", "emit_nvtx", "export_to_chrome", "row_limit"),
                *("sort_by_key", "record_module_names", "record_shapes", "profile_memory", "with_stack", "with_flops"),
            ),
        },
    ),
    "plugins": Allowed(
        (),
        {
            f"{_ENVIRONMENTS}SLURMEnvironment": ("auto_requeue", "requeue_signal"),
            f"{_ENVIRONMENTS}TorchElasticEnvironment": (),
            f"{_ENVIRONMENTS}LightningEnvironment": (),
        },
        many=True,
    ),
}
"""By key of the trainer: all that it may name."""

ZERO_SETTINGS = (
    *("zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "communication_data_type"),
    *("prescale_gradients", "gradient_predivide_factor", "sparse_gradients", "disable_allgather", "seq_parallel_size"),
    *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "activation_checkpointing"),
    *("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu"),
    *("optimizer", "scheduler", "fp16", "bf16", "torch_autocast"),
)
"""Keys of DeepSpeed's JSON in ``ZeroStrategy.config``; others compile, profile, load or tune by what they name.

Those of the last two lines are refused by ``zero_settings``, which says where the recipe says them.
"""
