# The sandbox job: the one definition that both the backend and a person use.
#
#   nomad var put nomad/jobs/atropos-sandbox-agent-env token=$(openssl rand -hex 32)
#   nomad job run -var count=2 nomad/sandbox.nomad.hcl
#
# The backend reads this file through /v1/jobs/parse with variables. Clients need nomad/client-plugin.hcl, and
# docker/sandbox/seccomp.json at the path that `seccomp_profile` names.

variable "job_id" {
  description = "Name of the job; pools with the same sandbox_job_id share its containers."
  type        = string
  default     = "atropos-sandbox-agent-env"
}

variable "count" {
  description = "Containers to start with; pools scale it from there."
  type        = number
  default     = 1
}

variable "image" {
  description = "Sandbox image, as `make image` builds it."
  type        = string
  default     = "atropos-sandbox:local"
}

variable "force_pull" {
  description = "Ask the registry for a tag even when the client has it."
  type        = bool
  default     = false
}

variable "slots" {
  description = "Slots in a container."
  type        = number
  default     = 10
}

variable "slot_memory_mib" {
  description = "Memory of one slot, in MiB, the files it writes included."
  type        = number
  default     = 1024
}

variable "slot_pids" {
  description = "Processes and threads in one slot."
  type        = number
  default     = 256
}

variable "config" {
  description = "More settings of the sandbox server (atropos.config.ServerConfig) as a JSON object; they win."
  type        = string
  default     = "{}"
}

variable "memory_mib" {
  description = "Memory of a container in MiB; 0: 256 for the server, and slots x slot_memory_mib. Less is over-commit."
  type        = number
  default     = 0
}

variable "cpu_mhz" {
  description = "CPU share that a container reserves, in MHz; idle CPU is used beyond it."
  type        = number
  default     = 500
}

variable "pids" {
  description = "Processes and threads in a container; 0: 512 for the server, and slots x slot_pids."
  type        = number
  default     = 0
}

variable "kill_timeout" {
  description = "How long leases may go on after a stop; a client's max_kill_timeout (30s) bounds it."
  type        = string
  default     = "30s"
}

variable "lost_after" {
  description = "How long after Nomad lost contact with a client its containers are given up and replaced."
  type        = string
  default     = "20s"
}

variable "host_network" {
  description = "Use the client's own network instead of Docker's bridge: no port mapping, and no wall between the two."
  type        = bool
  default     = false
}

variable "static_port" {
  description = "The same port on every client; 0: any free one, so that a client can hold several containers."
  type        = number
  default     = 0
}

variable "seccomp_profile" {
  description = "Path of docker/sandbox/seccomp.json on the clients."
  type        = string
  default     = "/etc/atropos/seccomp.json"
}

variable "security_opt" {
  description = "More Docker security options, e.g. [\"apparmor=unconfined\"] where AppArmor refuses mounts."
  type        = list(string)
  default     = []
}

variable "region" {
  type    = string
  default = "global"
}

variable "namespace" {
  type    = string
  default = "default"
}

variable "datacenters" {
  type    = list(string)
  default = ["*"]
}

variable "node_pool" {
  description = "Node pool to place containers in."
  type        = string
  default     = "default"
}

variable "priority" {
  type    = number
  default = 50
}

variable "image_volume" {
  description = "A host volume of the clients for images, shared by the containers of a node; empty: each keeps its own."
  type        = string
  default     = ""
}

variable "gpus" {
  description = "GPUs of a container, by the client's device plug-in."
  type        = number
  default     = 0
}

variable "gpu_device" {
  description = "What the plug-in calls them: a type, vendor/type, or vendor/type/model."
  type        = string
  default     = "nvidia/gpu"
}

variable "cdi_volume" {
  description = "A host volume of the clients with their CDI specifications, such as /etc/cdi; only with gpus."
  type        = string
  default     = "cdi"
}

variable "architecture" {
  description = "What clients must be, as Nomad names it: amd64 or arm64; empty: any that can run the image."
  type        = string
  default     = ""
}

variable "constraints" {
  description = "Further placement constraints: [{attribute = \"$${node.class}\", operator = \"=\", value = \"sandbox\"}]."
  type        = list(object({ attribute = string, operator = string, value = string }))
  default     = []
}

locals {
  limits = { memory_mib = var.slot_memory_mib, pids = var.slot_pids }
  config = jsondecode(var.config)
  server = merge({ slots = var.slots, limits = local.limits, drain_s = 25 }, local.config)
}

job "sandbox" {
  id          = var.job_id
  name        = var.job_id
  type        = "service"
  region      = var.region
  namespace   = var.namespace
  datacenters = var.datacenters
  node_pool   = var.node_pool
  priority    = var.priority

  constraint {
    attribute = "${attr.kernel.name}"
    value     = "linux"
  }

  dynamic "constraint" {
    for_each = var.architecture == "" ? [] : [var.architecture]
    content {
      attribute = "${attr.cpu.arch}"
      value     = constraint.value
    }
  }

  dynamic "constraint" {
    for_each = var.constraints
    content {
      attribute = constraint.value.attribute
      operator  = constraint.value.operator
      value     = constraint.value.value
    }
  }

  # A deployment in progress would make scaling answer 400; containers are replaced by draining, not by deployments.
  # Who changes the job all the same sets max_parallel = 1 meanwhile (docs/cluster.md); the rest is for then.
  update {
    max_parallel     = 0
    health_check     = "task_states"
    min_healthy_time = "5s"
    healthy_deadline = "2m"
  }

  group "sandbox" {
    count = var.count

    network {
      port "http" {
        to     = var.host_network ? 0 : 8787
        static = var.static_port
      }
    }

    # A crashed server comes back in its allocation at once; a crash loop goes elsewhere.
    restart {
      attempts         = 3
      interval         = "1m"
      delay            = "1s"
      mode             = "fail"
      render_templates = false
    }

    reschedule {
      delay          = "5s"
      delay_function = "exponential"
      max_delay      = "1m"
      unlimited      = true
    }

    # A client that Nomad has lost contact with keeps its containers for a while: pools still reach them, and go on.
    disconnect {
      lost_after = var.lost_after
      replace    = false
      reconcile  = "keep_original"
    }

    # A node's drain moves containers one after the other; each one's leases get kill_timeout.
    migrate {
      max_parallel     = 1
      health_check     = "task_states"
      min_healthy_time = "1s"
      healthy_deadline = "2m"
    }

    spread {
      attribute = "${node.unique.id}"
    }

    dynamic "volume" {
      for_each = var.image_volume == "" ? [] : [var.image_volume]
      labels   = ["images"]
      content {
        type   = "host"
        source = volume.value
      }
    }

    dynamic "volume" {
      for_each = var.gpus > 0 ? [var.cdi_volume] : []
      labels   = ["cdi"]
      content {
        type      = "host"
        source    = volume.value
        read_only = true
      }
    }

    task "server" {
      driver       = "docker"
      kill_signal  = "SIGTERM"
      kill_timeout = var.kill_timeout

      config {
        image        = var.image
        force_pull   = var.force_pull
        hostname     = var.host_network ? "" : "atropos" # the slots' too: nothing inside may set one
        ports        = var.host_network ? [] : ["http"]
        network_mode = var.host_network ? "host" : "bridge"
        cgroupns     = "private"
        pids_limit   = var.pids > 0 ? var.pids : 512 + var.slots * var.slot_pids
        cap_drop     = ["all"]
        cap_add      = ["sys_admin", "setuid", "setgid", "setpcap", "chown", "dac_override"]
        security_opt = concat(["seccomp=${var.seccomp_profile}"], var.security_opt)
      }

      env {
        ATROPOS_CONFIG     = jsonencode(local.server)
        ATROPOS_HOST       = var.host_network ? "$${NOMAD_IP_http}" : "0.0.0.0"
        ATROPOS_PORT       = var.host_network ? "$${NOMAD_PORT_http}" : "8787"
        ATROPOS_TOKEN_FILE = "$${NOMAD_SECRETS_DIR}/token"
        ATROPOS_TLS_FILE   = "$${NOMAD_SECRETS_DIR}/tls.pem"
      }

      dynamic "volume_mount" {
        for_each = var.image_volume == "" ? [] : [var.image_volume]
        content {
          volume      = "images"
          destination = "/var/cache/atropos/images"
        }
      }

      # The device plug-in puts the GPUs in; by these files the server gives each slot its own.
      dynamic "volume_mount" {
        for_each = var.gpus > 0 ? ["/etc/cdi"] : []
        content {
          volume      = "cdi"
          destination = volume_mount.value
          read_only   = true
        }
      }

      # The bearer token: `nomad var put nomad/jobs/<job_id> token=...`, or the backend makes it.
      template {
        data        = "{{ with nomadVar \"nomad/jobs/${var.job_id}\" }}{{ .token }}{{ end }}"
        destination = "$${NOMAD_SECRETS_DIR}/token"
        perms       = "0400"
        change_mode = "noop"
      }

      # Certificate and key, where the variable has them; else the server speaks plain HTTP.
      template {
        data        = "{{ with nomadVar \"nomad/jobs/${var.job_id}\" }}{{ with .certificate }}{{ . }}{{ end }}\n{{ with .key }}{{ . }}{{ end }}{{ end }}"
        destination = "$${NOMAD_SECRETS_DIR}/tls.pem"
        perms       = "0400"
        change_mode = "noop"
      }

      logs {
        max_files     = 2
        max_file_size = 5
      }

      resources {
        cpu    = var.cpu_mhz
        memory = var.memory_mib > 0 ? var.memory_mib : 256 + var.slots * var.slot_memory_mib

        dynamic "device" {
          for_each = var.gpus > 0 ? [var.gpu_device] : []
          labels   = [device.value]
          content {
            count = var.gpus
          }
        }
      }
    }
  }
}
