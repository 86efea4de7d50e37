"""Drive a pool of SGLang engines from your own RL training script.

import sglrollout as sr

async with sr.AsyncRolloutEngine(model="Qwen/Qwen2.5-1.5B") as rollout:
    groups = await rollout.generate(prompts, n=8, sampling=sr.Sampling(max_new_tokens=512))
"""

from sglrollout.blocking import (
    BlockingCollector,
    BlockingGroupStream,
    BlockingSession,
    BlockingSessionStream,
    BlockingStream,
    BlockingWeightSyncer,
    RolloutEngine,
)
from sglrollout.collect import filters
from sglrollout.collect.batch import Padding, RolloutBatch
from sglrollout.collect.calls import Verdict
from sglrollout.collect.collector import Collector
from sglrollout.collect.mismatch import MismatchReport, importance_weights, mismatch
from sglrollout.collect.stats import CollectReport, CollectStats
from sglrollout.collect.task import Task
from sglrollout.config import RolloutConfig, Sampling
from sglrollout.engine.remote import RemoteEngine
from sglrollout.engine.server import SGLangServer, launch_server
from sglrollout.errors import (
    ChannelError,
    ConfigError,
    DeviceMemoryError,
    EngineConnectionError,
    EngineDiedError,
    EngineError,
    EngineRequestError,
    EngineStartError,
    FailureBudgetError,
    HostMemoryError,
    LifecycleError,
    NoEngineError,
    PlacementError,
    QueueFullError,
    RequestTimeoutError,
    RewardError,
    RolloutError,
    StaleWeightsError,
    UnsupportedVersionError,
    WeightMismatchError,
    WeightNamesError,
    WeightSyncError,
)
from sglrollout.generation.batch import GroupStream
from sglrollout.generation.stream import Stream
from sglrollout.observe.metrics import EngineMetrics, Metrics
from sglrollout.observe.series import Summary
from sglrollout.pool.sleep import SleepReport
from sglrollout.rollout import AsyncRolloutEngine, EngineStatus
from sglrollout.serve.endpoint import OpenAIEndpoint
from sglrollout.session.environment import Environment
from sglrollout.session.session import Session
from sglrollout.session.stream import SessionStream
from sglrollout.session.tools import Tool, ToolCall, ToolResult
from sglrollout.session.turn import Turn
from sglrollout.types import Chunk, Completion, FinishReason, Group, Message, Prompt, Timings, VersionSpan
from sglrollout.version import __version__
from sglrollout.weights.lora_source import LoRASource
from sglrollout.weights.remote import Broadcast, Disk
from sglrollout.weights.report import SyncReport, VerifyReport
from sglrollout.weights.sources import FSDPSource, ModuleSource, TensorSource
from sglrollout.weights.syncer import WeightSyncer

__all__ = [
    "AsyncRolloutEngine",
    "BlockingCollector",
    "BlockingGroupStream",
    "BlockingSession",
    "BlockingSessionStream",
    "BlockingStream",
    "BlockingWeightSyncer",
    "Broadcast",
    "ChannelError",
    "Chunk",
    "CollectReport",
    "CollectStats",
    "Collector",
    "Completion",
    "ConfigError",
    "DeviceMemoryError",
    "Disk",
    "EngineConnectionError",
    "EngineDiedError",
    "EngineError",
    "EngineMetrics",
    "EngineRequestError",
    "EngineStartError",
    "EngineStatus",
    "Environment",
    "FSDPSource",
    "FailureBudgetError",
    "FinishReason",
    "Group",
    "GroupStream",
    "HostMemoryError",
    "LifecycleError",
    "LoRASource",
    "Message",
    "Metrics",
    "MismatchReport",
    "ModuleSource",
    "NoEngineError",
    "OpenAIEndpoint",
    "Padding",
    "PlacementError",
    "Prompt",
    "QueueFullError",
    "RemoteEngine",
    "RequestTimeoutError",
    "RewardError",
    "RolloutBatch",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutError",
    "SGLangServer",
    "Sampling",
    "Session",
    "SessionStream",
    "SleepReport",
    "StaleWeightsError",
    "Stream",
    "Summary",
    "SyncReport",
    "Task",
    "TensorSource",
    "Timings",
    "Tool",
    "ToolCall",
    "ToolResult",
    "Turn",
    "UnsupportedVersionError",
    "Verdict",
    "VerifyReport",
    "VersionSpan",
    "WeightMismatchError",
    "WeightNamesError",
    "WeightSyncError",
    "WeightSyncer",
    "__version__",
    "filters",
    "importance_weights",
    "launch_server",
    "mismatch",
]
