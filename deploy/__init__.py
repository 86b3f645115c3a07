"""The local cluster: servers, supervisor, command line."""
