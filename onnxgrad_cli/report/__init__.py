"""The report of a build: the request, the result, its cost and its proof. A `Report` is rendered in several formats.

report = make_report(built=built, proof=proof, files=[File.of(out, "training model")], command=sys.argv)
text = render(report, "md")           # or "html", "json"
console.print(summary(report))        # the short form, for a terminal
"""

from onnxgrad_cli.report.make import make_report
from onnxgrad_cli.report.model import File, Report
from onnxgrad_cli.report.render import FORMATS, render
from onnxgrad_cli.report.terminal import summary

__all__ = ["FORMATS", "File", "Report", "make_report", "render", "summary"]
