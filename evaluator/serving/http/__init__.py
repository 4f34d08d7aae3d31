"""HTTP: ports, routes and JSON."""
