"""Example reports for the site: a page that fetches plotly.js gets it put in, so that the site needs no network."""

import base64
import hashlib
import re

_FETCHED = re.compile(r'<script src="(?P<url>[^"]+)" integrity="(?P<digest>[^"]+)"[^>]*></script>')


def without_network(page: str) -> str:
    """A report with plotly.js in it where it would fetch it.

    Raises:
        ValueError: the installed plotly.js is another one than the page was made with.
    """
    from plotly.offline import get_plotlyjs

    fetched = _FETCHED.search(page)
    if fetched is None:
        return page
    source: str = get_plotlyjs()
    digest = f"sha256-{base64.b64encode(hashlib.sha256(source.encode('utf-8')).digest()).decode('ascii')}"
    if digest != fetched["digest"] or "</script" in source:
        raise ValueError("plotly in requirements/docs.lock has another plotly.js than the pages in reports/")
    admitted = page.replace(f" {fetched['url']};", f" '{digest}';", 1)
    return admitted.replace(fetched[0], f"<script>{source}</script>")
