"""MSJobs, the jobs of MindSpore's operator, as jobs of the operators that spmdctx writes for."""
