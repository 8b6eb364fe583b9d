# A Nomad of one's own for development: nomad agent -dev -config nomad/dev-agent.hcl (as root, with dockerd running).
plugin "docker" {
  config {
    allow_caps   = ["sys_admin", "setuid", "setgid", "setpcap", "chown", "dac_override"]
    pids_limit   = 0                       # the job sets its own
    extra_labels = ["job_id", "namespace"] # so that `docker ps --filter label=com.hashicorp.nomad.job_id=...` works
    gc {
      image = false # keep the image between runs
      dangling_containers {
        enabled = false # other agents may share this dockerd
      }
    }
  }
}

client {
  options = {
    # Probing for a cloud's metadata costs seconds at start, and fails hard where AWS_CA_BUNDLE is set.
    "fingerprint.denylist" = "env_aws,env_gce,env_azure,env_digitalocean"
  }
}
