"""The objects that the operators JobSet, Kubeflow Trainer and KubeRay run."""
