"""An HTTP endpoint with the newest metrics of a run, for a Prometheus server to scrape.

prometheus_client is imported only where config.monitoring.trackers names 'prometheus'.
"""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jaxrl_llm.checkpointing.metrics_log import STEP
from jaxrl_llm.types import JsonObject, UserError

if TYPE_CHECKING:
  from prometheus_client.metrics_core import GaugeMetricFamily

  from jaxrl_llm.config.schema import MonitoringConfig

NAME = 'prometheus'  # in config.monitoring.trackers
_PREFIX = 'jaxrl_llm_'
_FIELD = 'config.monitoring.prometheus'


class Prometheus:
  """Gauges of the newest values at http://HOST:PORT/metrics, of config.monitoring.prometheus, until the run ends.

  'critic/score/mean' is the gauge jaxrl_llm_critic_score_mean, whose help text is the metric's own name.
  """

  def __init__(self, root: str, config: JsonObject, start: int):
    import prometheus_client

    settings = config['monitoring'][NAME]
    self._newest: dict[str, float] = {}
    # A registry of its own: the default one adds gauges of the Python process.
    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(self)
    self._server, self._thread = prometheus_client.start_http_server(
      settings['port'], settings['host'], registry
    )

  def describe(self) -> list[GaugeMetricFamily]:
    """No gauge is known before the first step."""
    return []

  def collect(self) -> Iterator[GaugeMetricFamily]:
    """The gauges, on a thread of the server for each request."""
    from prometheus_client.metrics_core import GaugeMetricFamily

    newest = self._newest  # replaced as a whole by the thread that trains, never changed
    for name, metric in gauge_names(list(newest)).items():
      yield GaugeMetricFamily(name, metric, newest[metric])

  def log(self, step: int, numbers: dict[str, float]) -> None:
    self._newest = self._newest | numbers | {STEP: float(step)}

  def close(self) -> None:
    self._server.shutdown()
    self._server.server_close()
    self._thread.join()


def gauge_names(metrics: Sequence[str]) -> dict[str, str]:
  """{gauge: metric}. Characters that Prometheus does not allow become '_'; a name already taken gets a number."""
  gauges: dict[str, str] = {}
  for metric in metrics:
    base = name = _PREFIX + re.sub('[^a-zA-Z0-9_]', '_', metric)
    number = 2
    while name in gauges:
      name, number = f'{base}_{number}', number + 1
    gauges[name] = metric
  return gauges


def check(monitoring: MonitoringConfig) -> None:
  """Raises UserError for a port out of range."""
  port = monitoring.prometheus.port
  if not 0 < port < 2**16:
    raise UserError(f'{_FIELD}.port={port} must be between 1 and {2**16 - 1}.')


def check_free(monitoring: MonitoringConfig) -> None:
  """Raises UserError where the endpoint of this run cannot be opened, such as for a port in use."""
  if NAME not in monitoring.trackers:
    return
  check(monitoring)
  host, port = monitoring.prometheus.host, monitoring.prometheus.port
  try:
    family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
      probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
      probe.bind(address)
  except OSError as error:
    if error.errno == errno.EADDRINUSE:
      raise UserError(
        f'{_FIELD}.port={port} is in use on {host}; name a free one, a different one for each run of a machine.'
      ) from error
    raise UserError(
      f'{_FIELD}: {host!r} port {port} cannot be opened ({error}); the host is an address of this machine, '
      'such as 127.0.0.1, and a port below 1024 needs privileges.'
    ) from error
