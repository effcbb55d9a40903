"""What do operators see, and what pages them?  Dashboards, recording rules, alerts and runbooks, generated from code.

`queries` builds PromQL over the metric catalogue, `panels` defines the parts of a dashboard, `boards` has the
dashboards, `rules` the recording rules and alerts with their runbooks, `examples` the inputs on which each alert must
or must not fire. `grafana` converts boards to Grafana's JSON, `contents` has all files of `dashboards/`, and
`python -m tests.generate_dashboards` writes them. The package ships the files, not this generator."""
