"""All settings of a process, one struct per group."""

from __future__ import annotations

from antiphon.config.access import AccessConfig
from antiphon.config.cluster import ClusterConfig
from antiphon.config.detokenizer import DetokenizerConfig
from antiphon.config.encoder import EncoderConfig
from antiphon.config.gateway import GatewayConfig
from antiphon.config.grammar import GrammarConfig
from antiphon.config.kv_storage import KvStorageConfig
from antiphon.config.loading import LoadConfig
from antiphon.config.metrics import MetricsConfig
from antiphon.config.model import ModelConfig
from antiphon.config.process import BusConfig, HealthConfig, ServiceConfig, TelemetryConfig
from antiphon.config.request_log import RequestLogConfig
from antiphon.config.responses import ResponsesConfig
from antiphon.config.scheduler import SchedulerConfig
from antiphon.config.schema import Config
from antiphon.config.sessions import SessionsConfig
from antiphon.config.supervisor import SupervisorConfig
from antiphon.config.tokenizer import TokenizerConfig
from antiphon.config.worker import BatchingConfig, CacheConfig, QueueConfig


class Settings(Config):
    """`--<group>-<field>` on the command line, `ANTIPHON_<GROUP>__<FIELD>` in the environment."""

    cluster: ClusterConfig = ClusterConfig()
    model: ModelConfig = ModelConfig()
    load: LoadConfig = LoadConfig()
    bus: BusConfig = BusConfig()
    service: ServiceConfig = ServiceConfig()
    health: HealthConfig = HealthConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    metrics: MetricsConfig = MetricsConfig()
    gateway: GatewayConfig = GatewayConfig()
    request_log: RequestLogConfig = RequestLogConfig()
    access: AccessConfig = AccessConfig()
    responses: ResponsesConfig = ResponsesConfig()
    sessions: SessionsConfig = SessionsConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    batching: BatchingConfig = BatchingConfig()
    queue: QueueConfig = QueueConfig()
    cache: CacheConfig = CacheConfig()
    grammar: GrammarConfig = GrammarConfig()
    detokenizer: DetokenizerConfig = DetokenizerConfig()
    encoder: EncoderConfig = EncoderConfig()
    kv_storage: KvStorageConfig = KvStorageConfig()
    supervisor: SupervisorConfig = SupervisorConfig()
