"""Reading what a server's metrics say."""

from collections.abc import Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scrape(url: str, token: str | None = None) -> Samples:
    """All samples, by name and sorted labels."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=url, headers=headers) as http:
        answer = await http.get("/metrics")
        assert answer.status_code == 200, answer.text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, labels: Mapping[str, str] | None = None) -> float:
    """One sample; 0 where it is not there."""
    return samples.get((name, tuple(sorted((labels or {}).items()))), 0.0)
