"""The driver side: data, routing, elasticity, metrics, command line and reports, on Ray."""
