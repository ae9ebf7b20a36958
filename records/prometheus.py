"""Prometheus exporter of the newest values of a run's metrics.

It has a registry of its own, separate from Ray's metrics.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping
from threading import Event as Flag
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from records.metrics import METRICS, PREFIX, RUN_GAUGES, Metric, exported_name, known_name
from records.rundir import Event

log = logging.getLogger(__name__)
LAST_SCRAPE_S = 15.0
"""Seconds for which a run that has finished stays for one more scrape. Else Prometheus would not
see that no iterations are left, and an alert would say that the run ended early.
"""
ANSWER_S = 0.2
"""Seconds for the answer to a scrape to be sent."""


class _Scrapes(Collector):
    """Notices scrapes, because a registry asks all its collectors in each, in their order."""

    def __init__(self):
        self.any, self.since_newest_row = False, Flag()

    def collect(self) -> Iterable[Family]:
        self.any = True
        self.since_newest_row.set()
        return ()


class PrometheusExporter:
    """A sink (``records.sinks``) that serves the last values it received; off if the port is 0.

    Its failures never end a run.
    """

    name = "prometheus"

    def __init__(
        self,
        port: int,
        host: str = "127.0.0.1",
        events: Event | None = None,
        run: str = "",
        iterations: int = 0,
    ):
        """Start serving on ``host:port`` what the run ``run`` of ``iterations`` iterations records.

        If that fails, log a warning, record the event ``metrics_unavailable``, and continue
        without.
        """
        self.registry = CollectorRegistry()
        self._instruments: dict[str, Gauge | Counter] = {}
        self._totals: dict[str, float] = {}
        self._server: tuple[WSGIServer, Thread] | None = None
        self._run, self._iterations, self._left = run, iterations, iterations
        self._scrapes = _Scrapes()
        self.registry.register(self._scrapes)  # before what a scrape is to contain
        self._run_gauges = {
            name: Gauge(PREFIX + name, text, ("run",), registry=self.registry)
            for name, text in RUN_GAUGES.items()
        }
        self._set("newest_row_timestamp_seconds", time.time())
        if port == 0:
            return
        try:
            self._server = start_http_server(port, addr=host, registry=self.registry)
        # TypeError, UnicodeError: not a valid host name
        except (OSError, TypeError, UnicodeError) as error:
            address, why = f"{host}:{port}", getattr(error, "strerror", None) or str(error)
            log.warning(
                f"metrics are not served: {address}: {why}; training continues (choose another"
                " with --set logging.prometheus_port=PORT, 0 for none)"
            )
            if events is not None:
                events("metrics_unavailable", address=address, why=why)

    def row(self, row: Mapping[str, object]) -> None:
        """Take the numbers of a row of metrics.jsonl; ignore text, null and booleans."""
        for name, value in row.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            # An evaluation's iteration is the number of updates before it, not the run's newest.
            if name != "iteration" or row.get("kind") != "evaluation":
                self._observe(name, float(value))
        self._set("newest_row_timestamp_seconds", time.time())
        if isinstance(iteration := row.get("iteration"), int):
            # an evaluation's iteration is the number of those before it
            finished = iteration + (row.get("kind") == "iteration")
            self._left = max(0, self._iterations - finished)
            self._set("iterations_left", self._left)
        self._scrapes.since_newest_row.clear()

    def close(self) -> None:
        """Stop serving; the port is free on return.

        A run that has finished, and that somebody scrapes, is scraped once more before.
        """
        if self._server is not None:
            if self._scrapes.any and not self._left:
                self._scrapes.since_newest_row.wait(LAST_SCRAPE_S)
                time.sleep(ANSWER_S)
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join(timeout=5)
            self._server = None

    def _set(self, name: str, value: float) -> None:
        self._run_gauges[name].labels(run=self._run).set(value)

    def _observe(self, name: str, value: float) -> None:
        key, scorer = known_name(name)
        metric = METRICS.get(key, Metric(f"{name} of metrics.jsonl"))
        # where the scorer is no label, each name is exported by itself
        exported = exported_name(key if scorer or key == name else name)
        instrument = self._instruments.get(exported)
        if instrument is None:
            make = Counter if metric.kind in ("total", "increment") else Gauge
            labels = ("scorer",) if scorer else ()
            instrument = make(exported, metric.help, labels, registry=self.registry)
            self._instruments[exported] = instrument
        if isinstance(instrument, Counter):
            if math.isfinite(value) and value >= 0:
                instrument.inc(self._added(key, value) if metric.kind == "total" else value)
        else:
            (instrument.labels(scorer=scorer) if scorer else instrument).set(value)

    def _added(self, name: str, total: float) -> float:
        """Return by how much a running total exceeds its previous maximum.

        A total decreases when a run returns to a checkpoint.
        """
        highest = self._totals.get(name, 0.0)
        self._totals[name] = max(highest, total)
        return self._totals[name] - highest
