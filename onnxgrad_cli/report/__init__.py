"""What was asked, what was done, what it costs and how it was proved: one `Report`, rendered in several formats.

report = make_report(built=built, proof=proof, files=[File.of(out, "training model")], command=sys.argv)
text = render(report, "md")           # or "html", "json", "txt"
console.print(summary(report))        # the short form, for a terminal
"""

from onnxgrad_cli.report.make import make_report
from onnxgrad_cli.report.model import File, Report
from onnxgrad_cli.report.render import FORMATS, render, summary

__all__ = ["FORMATS", "File", "Report", "make_report", "render", "summary"]
