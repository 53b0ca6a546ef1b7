"""`spmdctx k8s`: manifests for a cluster's operators, and jobs on it."""
