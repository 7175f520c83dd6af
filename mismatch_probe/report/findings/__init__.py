"""What `headroom` and `localize` found, as a page of its own and as a section of a comparison's page."""

from mismatch_probe.report.findings.page import findings_section, render_document, write_findings_report

__all__ = ["findings_section", "render_document", "write_findings_report"]
