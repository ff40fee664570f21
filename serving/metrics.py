"""Counts for /metrics, in Prometheus' text format, and for the page: the last minutes, second by second."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["History", "Metrics"]

_LATENCIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_SECONDS_KEPT = 300

_GAUGES = {
    "running": "Outputs that the engine works on.",
    "waiting": "Outputs that wait for a place in the engine.",
    "pages_used": "Cache pages in use, kept prefixes not counted.",
    "pages_total": "Cache pages in all.",
    "cache_bytes": "Bytes of all caches.",
}
_COUNTERS = {
    "steps": "Steps of the engine.",
    "decode_tokens": "Tokens generated.",
    "prefill_tokens": "Prompt tokens computed.",
    "cached_tokens": "Prompt tokens that the prefix cache held.",
    "preemptions": "Times that a request lost its pages.",
}


class _EngineCollector(Collector):
    """The engine's last report as metrics."""

    def __init__(self, report: Callable[[], Mapping[str, Any]], healthy: Callable[[], bool]) -> None:
        self._report = report
        self._healthy = healthy

    def collect(self) -> Iterable[Metric]:
        """Called at each scrape."""
        yield GaugeMetricFamily(
            "halocline_engine_up", "1 while the engine is alive and stepping.", float(self._healthy())
        )
        report = self._report()
        for name, text in _GAUGES.items():
            if name in report:
                yield GaugeMetricFamily(f"halocline_engine_{name}", text, float(report[name]))
        for name, text in _COUNTERS.items():
            if name in report:
                yield CounterMetricFamily(f"halocline_engine_{name}", text, float(report[name]))


class Metrics:
    """Counters of the server. One object, one registry: nothing is global."""

    def __init__(self, report: Callable[[], Mapping[str, Any]], healthy: Callable[[], bool]) -> None:
        """Starts at zero; `report` and `healthy` are asked at each scrape."""
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(report, healthy))
        self._requests = Counter(
            "halocline_requests", "Calls answered.", ["endpoint", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "halocline_request_seconds",
            "From a call to the end of its answer.",
            ["endpoint"],
            buckets=_LATENCIES,
            registry=self._registry,
        )
        self._first = Histogram(
            "halocline_first_token_seconds",
            "From a call to its first token.",
            ["endpoint"],
            buckets=_LATENCIES,
            registry=self._registry,
        )

    def answered(self, endpoint: str, status: int, seconds: float) -> None:
        """Counts a call."""
        self._requests.labels(endpoint, str(status)).inc()
        self._seconds.labels(endpoint).observe(seconds)

    def first_token(self, endpoint: str, seconds: float) -> None:
        """Counts a first token."""
        self._first.labels(endpoint).observe(seconds)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)


class History:
    """Throughput of the last minutes, from the engine's reports."""

    def __init__(self) -> None:
        self._rows: deque[dict[str, float]] = deque(maxlen=_SECONDS_KEPT)
        self._last: tuple[float, float, float] | None = None

    def sample(self, report: Mapping[str, Any]) -> None:
        """Adds a row; to be called about once a second."""
        now = time.time()
        decode, prefill = float(report.get("decode_tokens", 0)), float(report.get("prefill_tokens", 0))
        if self._last is not None and now > self._last[0]:
            seconds = now - self._last[0]
            self._rows.append(
                {
                    "time": round(now, 1),
                    "decode_per_s": round((decode - self._last[1]) / seconds, 1),
                    "prefill_per_s": round((prefill - self._last[2]) / seconds, 1),
                    "running": float(report.get("running", 0)),
                    "waiting": float(report.get("waiting", 0)),
                }
            )
        self._last = (now, decode, prefill)

    def rows(self) -> list[dict[str, float]]:
        """Oldest first."""
        return list(self._rows)
