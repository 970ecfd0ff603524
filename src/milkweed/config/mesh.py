"""Mesh files: which hosts there are and what runs where. Wrong ones are refused before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from milkweed.config import reading
from milkweed.errors import ConfigError

DTYPES = Literal["float32", "bfloat16"]
# Kinds of hosts the design names and this version cannot bring up.
FUTURE_KINDS = ("addresses", "slurm", "kubernetes", "ray")
POLICIES = ("trainer", "reference", "critic", "reward_model")
"""The roles that are models of the trainer's kind, one of each at most."""
WITHOUT = (("hosts", "gpus"), ("rollout", "replicas"), ("rollout", "standby"), ("teacher", "standby"), ("rollout", "max_replicas"), ("teacher", "max_replicas"), ("reward", "replicas"), ("environment", "replicas"), ("faults", "retries"), ("faults", "role_retries"), ("faults", "host_retries"))  # fmt: skip
"""What a mesh may have none of."""


class Place(msgspec.Struct, frozen=True):
    """Where one replica runs."""

    host: int
    """Index of the host."""
    gpus: tuple[int, ...] = ()
    """Its GPUs, by their numbers on that host; empty on CPU."""
    threads: int = 1
    """CPU threads of each of its processes."""
    cpu: bool = True

    def environment(self, visible: str | None = None) -> dict[str, str]:
        """What its processes must find in the environment when they start. `visible` is the controller's own
        CUDA_VISIBLE_DEVICES: GPU numbers then count within it. Raises ConfigError where it holds too few."""
        env = {"OMP_NUM_THREADS": str(self.threads)}
        if self.cpu:
            return env
        names = [str(g) for g in self.gpus]
        if visible is not None:
            have = [v.strip() for v in visible.split(",") if v.strip()]
            if self.gpus and max(self.gpus) >= len(have):
                raise ConfigError(
                    f"the mesh puts a replica on GPU {max(self.gpus)}, but CUDA_VISIBLE_DEVICES={visible!r} "
                    f"holds {len(have)}: unset it or lower hosts.gpus"
                )
            names = [have[g] for g in self.gpus]
        return env | {"CUDA_VISIBLE_DEVICES": ",".join(names)}


class HostsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: str = "local"
    """`local`: processes on this machine."""
    count: int = 1
    """How many hosts. With kind `local` more than one share the machine; its GPUs are split between them."""
    gpus: int = 0
    """GPUs of each host."""
    notice: str = ""
    """A file whose appearing says that a host is about to be taken away; `{host}` in it stands for the host's number. Its
    engines then hand over to others; when the file is gone again, the host is used again."""
    notice_s: float = 30
    """Seconds that engines of such a host have to finish what they sample."""
    orphan_grace_s: float = 0
    """Seconds that hosts and engines wait for the next controller of the same run directory when theirs is killed; 0: all
    is gone within 5 s. The engines are then processes of the hosts' own, called over a socket instead of Monarch."""


class TrainerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One policy, its frozen reference, its critic, or a reward model."""

    data_parallel_replicate: int = 1
    """Copies of the sharded model (HSDP with `data_parallel_shard` above 1)."""
    data_parallel_shard: int = 1
    """Ranks that the parameters are sharded over (FSDP)."""
    tensor_parallel: int = 1
    """Ranks that each matrix is split over."""
    context_parallel: int = 1
    """Ranks that each sequence is split over."""
    dtype: DTYPES = "float32"
    """What the forward and backward pass compute in; the master weights are float32."""
    threads: int = 1
    """CPU threads of each process."""

    @property
    def procs(self) -> int:
        """Processes: the product of the degrees."""
        return self.data_parallel_replicate * self.data_parallel_shard * self.tensor_parallel * self.context_parallel


class TierConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """KV below what an engine holds itself."""

    memory_ratio: float = 0
    """Each engine's host memory for it, as a multiple of its own KV; 0: nothing lies below."""
    files_gb: float = 0
    """Files below that memory, shared by the engines of a host: at most so many GB in all; 0: none."""
    folder: str = "/dev/shm"
    """Where the files are: in memory, or on a local disk."""


class PrefillConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Engines that only compute prompts. Where there are any, those of [rollout] only decode: each sample goes to one of
    either, and the KV of its prompt from the first to the second, over NIXL."""

    replicas: int = 0
    """How many engines prefill; 0: every engine does both."""
    threads: int = 1
    """CPU threads of each."""


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engines that sample."""

    replicas: int = 1
    """How many engines serve."""
    max_replicas: int = 0
    """Up to so many serve while there is much to sample, and `replicas` at least; 0: always `replicas`."""
    target_requests: int = 64
    """Samples at hand, running or waiting, that are one engine's share; with more another is started."""
    upscale_delay_s: float = 30
    """Seconds whose mean must ask for more engines before some are started."""
    downscale_delay_s: float = 300
    """Seconds whose mean must ask for fewer before some leave."""
    standby: int = 0
    """Further engines that hold every version and step in at once where one fails."""
    tensor_parallel: int = 1
    """Ranks inside each engine."""
    threads: int = 1
    """CPU threads of each rank."""
    overlap_score_weight: float = 16
    """How many samples in flight more than the least busy engine one may have and still be given a sample, for each 1000
    tokens of its prompt that it holds the KV of; 0 goes by load alone."""
    look_s: float = 60
    """Seconds between two looks at whether engines of one version hold the same weights, give the same log-probs and are
    about as fast as each other; one that is not is replaced. 0: never."""
    slower: float = 5
    """An engine this many times slower a token than its peers, in two looks on end, is replaced. 0: never."""
    in_batch_prefix_caching: bool = True
    """Samples that wait in an engine beside others with the same beginning let one compute it, and then use it."""
    kv_tier: TierConfig = TierConfig()
    prefill: PrefillConfig = PrefillConfig()
    engine: dict[str, Any] = {}
    """Handed to SGLang's ServerArgs as they are."""


class RewardConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    replicas: int = 1
    """How many processes score."""
    threads: int = 1
    """CPU threads of each."""
    credentials: tuple[str, ...] = ()
    """Environment variables that they may have although their names look like those of credentials ("OPENAI_API_KEY")."""


class EnvironmentConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    replicas: int = 0
    """How many processes run environments; 0 runs them in the controller."""
    threads: int = 1
    """CPU threads of each."""
    credentials: tuple[str, ...] = ()
    """As in [reward]."""


class TransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How weights travel from the trainer to the engines."""

    transport: Literal["auto", "shm", "nixl", "message"] = "auto"
    """`auto`: shared memory on the trainer's host, NIXL to others; the rest forces one way for all."""
    dtype: Literal["", "float32", "bfloat16"] = ""
    """What is sent; empty: what the engines compute in. Smaller is faster, and less exact where they compute in more."""
    relay: bool = True
    """Hosts hand versions on to each other, so that the trainer sends each once however many there are."""


class FaultsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often what fails is replaced before the run ends with its cause."""

    retries: int = 4
    """A place may fail so often in a row; the next failure ends the run."""
    role_retries: int = 8
    """Within `window_s`, a role may fail so often, and twice more for each of its places."""
    host_retries: int = 8
    """Within `window_s`, replicas of one host may fail so often; then others are used where there are any."""
    window_s: float = 300
    settled_s: float = 60
    """A replica that served for so many seconds has earned its place a fresh budget."""
    first_s: float = 1
    """Seconds that a place rests after its second failure in a row (after the first it does not), doubled with each more."""
    most_s: float = 30
    """The longest rest."""

    def rest_s(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row."""
        return 0.0 if failures < 2 else min(self.first_s * 2.0 ** min(failures - 2, 32), self.most_s)


class MeshConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hosts and roles. `origin` is the file it came from."""

    name: str = "local"
    device: Literal["cpu", "cuda"] = "cpu"
    """What the trainer and the engines compute on."""
    hosts: HostsConfig = HostsConfig()
    trainer: TrainerConfig = TrainerConfig()
    reference: TrainerConfig | None = None
    """Its own processes and devices; absent, a recipe that needs one gets the trainer's degrees and devices."""
    critic: TrainerConfig | None = None
    """As `reference`: own processes and devices, or the trainer's where a recipe has a critic."""
    reward_model: TrainerConfig | None = None
    """As `reference`, for a learned reward; `reward` are the processes that run reward functions."""
    rollout: EngineConfig = EngineConfig()
    teacher: EngineConfig | None = None
    """Engines of a teacher, for recipes that ask one; absent, as many as `rollout`, on the same devices: on GPUs give
    them some of their own, or lower mem_fraction_static in both."""
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    transfer: TransferConfig = TransferConfig()
    faults: FaultsConfig = FaultsConfig()
    origin: str = "this mesh"

    def __post_init__(self) -> None:
        self._check_values()
        self._layout()

    def place(self, role: str, index: int) -> Place:
        """Where replica `index` of `role` runs. A role that the file does not know (a puller, a user's own) runs on
        host `index` of the hosts in turn, without a GPU."""
        if role in POLICIES and index != 0:
            raise ConfigError(f"{self.origin}: there is one {role}, so {role}{index} has no place")
        found = self._layout().get((role, index))
        return found or Place(index % self.hosts.count, (), 1, self.device == "cpu")

    def degrees(self, role: str) -> TrainerConfig:
        """The degrees of a role of `POLICIES`: its own table's, or the trainer's."""
        return getattr(self, role) or self.trainer

    def engines(self, role: str) -> EngineConfig:
        """The engines of "rollout" or "teacher": the latter's own table's, or the former's."""
        return (self.teacher if role == "teacher" else None) or self.rollout

    def _check_values(self) -> None:
        if self.hosts.kind != "local":
            raise self._wrong(
                "hosts.kind",
                f"{self.hosts.kind!r} "
                + ("is not supported by this version" if self.hosts.kind in FUTURE_KINDS else "is unknown")
                + "; only 'local' (processes on this machine) is",
            )
        if not 0 <= self.hosts.orphan_grace_s < 1e7:
            raise self._wrong("hosts.orphan_grace_s", f"{self.hosts.orphan_grace_s:g} is no time to wait; 0 or more seconds")
        for table in ("hosts", *POLICIES, "rollout", "teacher", "reward", "environment", "faults"):
            part = getattr(self, table)
            for key in part.__struct_fields__ if part is not None else ():
                value = getattr(part, key)
                least = 0 if (table, key) in WITHOUT else 1
                if isinstance(value, int) and not isinstance(value, bool) and not key.endswith("_s") and value < least:
                    raise self._wrong(f"{table}.{key}", f"{value} is too few; at least {least}")
        for table in ("rollout", "teacher"):
            part = self.engines(table)
            if not part.look_s >= 0:
                raise self._wrong(f"{table}.look_s", f"{part.look_s:g} is no time between two looks; 0 (never) or more seconds")
            if part.slower != 0 and not part.slower >= 2:
                raise self._wrong(f"{table}.slower", f"{part.slower:g} would replace engines that are well; 0 (never) or at least 2")
            if not 0 <= part.overlap_score_weight < float("inf"):
                raise self._wrong(f"{table}.overlap_score_weight", f"{part.overlap_score_weight:g} is no weight; it must be 0 or above")
            if part.max_replicas and part.max_replicas < part.replicas:
                raise self._wrong(f"{table}.max_replicas", f"{part.max_replicas} is below the {part.replicas} of {table}.replicas; 0 keeps to these")
            for name in ("upscale_delay_s", "downscale_delay_s"):
                if not 1 <= getattr(part, name) < 1e5:
                    raise self._wrong(f"{table}.{name}", f"{getattr(part, name):g} is too short or too long; 1 to 99999 seconds")
            key, tier = f"{table}.kv_tier", part.kv_tier
            if not (tier.memory_ratio == 0 or 1 < tier.memory_ratio < float("inf")):
                raise self._wrong(f"{key}.memory_ratio", f"{tier.memory_ratio:g}: memory below an engine must hold more than the engine; 0 or above 1")
            if not 0 <= tier.files_gb < float("inf"):
                raise self._wrong(f"{key}.files_gb", f"{tier.files_gb:g} is no size; it must be 0 or above")
            if tier.files_gb and not tier.memory_ratio:
                raise self._wrong(f"{key}.files_gb", "files are read through host memory: set memory_ratio too, 2 for one")
            if tier.files_gb and not Path(tier.folder).is_absolute():
                raise self._wrong(f"{key}.folder", f"{tier.folder!r} must be a whole path, since every engine opens it")
        self._check_prefill()
        for name in ("window_s", "settled_s", "first_s", "most_s"):
            if not 0 <= getattr(self.faults, name) < 1e7:
                raise self._wrong(f"faults.{name}", f"{getattr(self.faults, name):g} is no time; 0 or more seconds")
        if not self.hosts.notice_s > 0:
            raise self._wrong("hosts.notice_s", f"{self.hosts.notice_s:g} is no time to hand over in; it must be above 0")
        try:
            self.hosts.notice.format(host=0)
        except (LookupError, ValueError) as error:
            raise self._wrong("hosts.notice", f"{self.hosts.notice!r} is no path; only {{host}} may stand in braces ({error!r})") from None
        if self.hosts.notice and self.hosts.count > 1 and "{host}" not in self.hosts.notice:
            raise self._wrong("hosts.notice", f"{self.hosts.notice!r} would speak of all {self.hosts.count} hosts at once; put {{host}} in it")
        if self.teacher is not None and self.teacher.max_replicas:
            raise self._wrong("teacher.max_replicas", "only the engines of [rollout] are scaled; leave it out")
        if self.device == "cuda" and self.hosts.gpus == 0:
            raise self._wrong("hosts.gpus", "device is 'cuda', so say how many GPUs each host has")
        if self.device == "cpu" and self.hosts.gpus:
            raise self._wrong(
                "hosts.gpus", f"{self.hosts.gpus}, but device is 'cpu'; set device = \"cuda\" or leave gpus out"
            )

    def _check_prefill(self) -> None:
        """What does not go together with engines that only prefill."""
        part = self.rollout
        for key, least in (("replicas", 0), ("threads", 1)):
            if (value := getattr(part.prefill, key)) < least:
                raise self._wrong(f"rollout.prefill.{key}", f"{value} is too few; at least {least}")
        if self.teacher is not None and self.teacher.prefill.replicas:
            raise self._wrong("teacher.prefill.replicas", "a teacher decodes nothing: give it more teacher.replicas instead")
        if given := sorted(k for k in part.engine if k.startswith("disaggregation_")):
            raise self._wrong(f"rollout.engine.{given[0]}", "say rollout.prefill.replicas instead; the rest follows from it")
        if not part.prefill.replicas:
            return
        if not part.replicas:
            raise self._wrong("rollout.replicas", f"0, so nobody decodes what {part.prefill.replicas} engines prefill: at least 1, or rollout.prefill.replicas = 0")
        whole = "or let every engine do both (rollout.prefill.replicas = 0)"
        if part.tensor_parallel != 1:
            raise self._wrong("rollout.tensor_parallel", f"{part.tensor_parallel}, but engines that prefill or decode only have one rank: set 1, {whole}")
        if part.kv_tier.memory_ratio:
            raise self._wrong("rollout.kv_tier.memory_ratio", f"no tier lies below engines that prefill or decode only: leave kv_tier out, {whole}")
        if self.hosts.orphan_grace_s:
            raise self._wrong("hosts.orphan_grace_s", f"a new controller does not take over engines that prefill or decode only: set 0, {whole}")

    def _layout(self) -> dict[tuple[str, int], Place]:
        """Every replica's place. GPUs go to trainer, reference, critic, reward model, prefill, rollout, teacher, in this
        order; a replica stays on one host."""
        cpu = self.device == "cpu"
        free = [list(range(h * self.hosts.gpus, (h + 1) * self.hosts.gpus)) for h in range(self.hosts.count)]
        found: dict[tuple[str, int], Place] = {}

        def put(role: str, index: int, gpus: int, threads: int) -> None:
            if cpu:
                found[role, index] = Place(index % self.hosts.count, (), threads, True)
                return
            for host, left in enumerate(free):
                if len(left) >= gpus:
                    found[role, index] = Place(host, tuple(left[:gpus]), threads, False)
                    del left[:gpus]
                    return
            have = self.hosts.count * self.hosts.gpus
            taken = have - sum(map(len, free))
            key = {"rollout": "rollout.replicas", "teacher": "teacher.replicas", "prefill": "rollout.prefill.replicas"}.get(role, role)
            raise self._wrong(
                key,
                f"{role}{index} needs {gpus} GPU{'s' * (gpus > 1)} of one host; {taken} of {have} are taken "
                f"(hosts.count {self.hosts.count} x hosts.gpus {self.hosts.gpus}): lower a degree or {key} or add GPUs",
            )

        put("trainer", 0, self.trainer.procs, self.trainer.threads)
        for role in POLICIES[1:]:
            own: TrainerConfig | None = getattr(self, role)
            if own is not None:
                put(role, 0, own.procs, own.threads)
            else:
                found[role, 0] = found["trainer", 0]
        for index in range(self.rollout.prefill.replicas):
            put("prefill", index, self.rollout.tensor_parallel, self.rollout.prefill.threads)
        for index in range(max(self.rollout.replicas, self.rollout.max_replicas) + self.rollout.standby):
            put("rollout", index, self.rollout.tensor_parallel, self.rollout.threads)
            found["teacher", index] = found["rollout", index]
        if self.teacher is not None:
            for index in range(self.teacher.replicas):
                put("teacher", index, self.teacher.tensor_parallel, self.teacher.threads)
        for role, table in (("reward", self.reward), ("environment", self.environment)):
            for index in range(table.replicas):
                found[role, index] = Place(index % self.hosts.count, (), table.threads, cpu)
        return found

    def _wrong(self, key: str, what: str) -> ConfigError:
        return ConfigError(f"{self.origin}: {key}: {what}")


def mesh_files() -> Path:
    """The folder of the mesh files that come with Milkweed: of the checkout, or of the installed package."""
    return shipped("meshes")


def shipped(folder: str) -> Path:
    """A top-level folder of the project (`meshes`, `recipes`), which a wheel carries inside the package."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parents[1]
    return (
        checkout / folder
        if (checkout / "pyproject.toml").is_file() and package.parent.name == "src"
        else package / folder
    )


def load_mesh(path_or_name: str | Path = "local", overrides: tuple[str, ...] | list[str] = ()) -> MeshConfig:
    """The mesh of a TOML file, or of one that comes with Milkweed by its name ("local"). Raises ConfigError."""
    path = Path(path_or_name)
    if path.suffix != ".toml" and not path.is_file():
        names = sorted(f.stem for f in mesh_files().glob("*.toml"))
        if str(path_or_name) not in names:
            hint = reading.suggest(str(path_or_name), names)
            raise ConfigError(
                f"no mesh named {str(path_or_name)!r}: {hint}give a .toml file or one of {', '.join(names)}"
            )
        path = mesh_files() / f"{path_or_name}.toml"
    return reading.load(MeshConfig, path, [f"origin={path}", *overrides])
