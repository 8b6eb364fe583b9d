# What a production client's configuration needs for the sandbox job: merge it into /etc/nomad.d/.
client {
  # The sandbox job asks for 30 s to let leases end when a container is told to stop.
  max_kill_timeout = "60s"
}

plugin "docker" {
  config {
    # Exactly these, for the container's first moments: the server gives them up before it listens.
    # Never `privileged`, never volumes: the sandbox job needs neither.
    allow_caps       = ["sys_admin", "setuid", "setgid", "setpcap", "chown", "dac_override"]
    allow_privileged = false
    volumes {
      enabled = false
    }
    pids_limit   = 0                       # 0: the job's own pids_limit holds; a number here would be the most that a job may ask
    extra_labels = ["job_id", "namespace"] # to find a job's containers with `docker ps --filter label=...`
    gc {
      image_delay = "24h" # the sandbox image is large, and used again
    }
  }
}
