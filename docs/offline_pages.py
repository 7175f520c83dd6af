"""Example reports for the site: a page that fetches plotly.js gets it put in, so that the site needs no network."""

import re

_FETCHED = re.compile(r'<script src="(?P<url>[^"]+)" integrity="(?P<digest>[^"]+)"[^>]*></script>')


def without_network(page: str) -> str:
    """A report with plotly.js in it where it would fetch it.

    Raises:
        ValueError: the installed plotly.js is another one than the page was made with.
    """
    from mismatch_probe.report.interactive import PlotlyJs, scripts

    fetched = _FETCHED.search(page)
    if fetched is None:
        return page
    embedded, digest = scripts(PlotlyJs.EMBED), fetched["digest"]
    if digest not in embedded.sources:
        raise ValueError("plotly in requirements/docs.lock has another plotly.js than the pages in reports/")
    packed = f'<script type="text/plain" id="plotlyjs">{embedded.packed}</script>'
    return page.replace(fetched[0], packed).replace(f" {fetched['url']};", f" '{digest}';", 1)
