"""Who runs when and in which pages: page accounts, prefix cache and scheduler. Host arrays only; imports no jax."""

from widemesh.serving.scheduling.config import SchedulerConfig
from widemesh.serving.scheduling.page_hash import hash_pages
from widemesh.serving.scheduling.page_pool import PagePool
from widemesh.serving.scheduling.plan import NO_WRITES, Accepted, DecodePlan, KvLoad, PageWrites, PrefillPlan, StepPlan
from widemesh.serving.scheduling.replay import ReplayConfig, ReplayRule
from widemesh.serving.scheduling.request import RequestState, ScheduledRequest
from widemesh.serving.scheduling.scheduler import Scheduler

__all__ = ["NO_WRITES", "Accepted", "DecodePlan", "KvLoad", "PagePool", "PageWrites", "PrefillPlan",
           "ReplayConfig", "ReplayRule", "RequestState", "ScheduledRequest", "Scheduler", "SchedulerConfig", "StepPlan",
           "hash_pages"]  # fmt: skip
