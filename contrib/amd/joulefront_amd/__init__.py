"""AMD's GPUs for joulefront: a platform and its meter, through amdsmi."""
