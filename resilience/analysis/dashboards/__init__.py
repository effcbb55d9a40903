"""What do operators see, and what wakes them?  Dashboards, recording rules, alerts and runbooks, made from code.

`queries` are PromQL over the metric catalogue, `panels` say what a dashboard is, `boards` are the dashboards,
`rules` the recording rules and alerts with their runbooks, `examples` the inputs on which each alert must and must
not fire. `grafana` turns boards into Grafana's JSON, and `export` writes all of it into a folder."""
