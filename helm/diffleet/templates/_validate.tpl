{{/*
Rules that join several values. Each fault is a sentence that names the values and the way out; all are told at once.
Faults are collected in a list inside a dict, since a template cannot return one.
*/}}
{{- define "diffleet.fault" -}}
{{- $_ := set .faults "list" (append .faults.list .text) -}}
{{- end -}}

{{- define "diffleet.validate" -}}
{{- $faults := dict "list" (list) -}}
{{- $ctx := dict "root" . "faults" $faults -}}
{{- include "diffleet.validateRedis" $ctx -}}
{{- include "diffleet.validateApi" $ctx -}}
{{- include "diffleet.validateJobs" $ctx -}}
{{- include "diffleet.validateShared" $ctx -}}
{{- include "diffleet.validatePools" $ctx -}}
{{- with $faults.list -}}
{{- fail (printf "\n\nThe values cannot work:\n- %s\n" (join "\n- " .)) -}}
{{- end -}}
{{- end -}}

{{- define "diffleet.validateRedis" -}}
{{- $values := .root.Values -}}
{{- $redis := $values.redis -}}
{{- if $values.devRedis.enabled -}}
{{- if $redis.host -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" "redis.host and devRedis.enabled exclude each other: name your server, or use the trial one.") -}}
{{- end -}}
{{- if or $redis.tls.enabled $redis.auth.existingSecret -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" "the trial server of devRedis has neither TLS nor users: leave redis.tls.enabled and redis.auth.existingSecret unset, or use a server of yours.") -}}
{{- end -}}
{{- if or (ne (int $redis.port) 6379) (ne (int $redis.db) 0) -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" "the trial server of devRedis listens on port 6379, database 0: leave redis.port and redis.db as they are.") -}}
{{- end -}}
{{- if ne $redis.kind "server" -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" (printf "the trial server of devRedis is a single one: redis.kind must be server, not %s." $redis.kind)) -}}
{{- end -}}
{{- else if and (eq $redis.kind "server") (not $redis.host) -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" "redis.host is empty: name a Redis >= 7 or Valkey >= 7.2, or set devRedis.enabled=true for a trial.") -}}
{{- else if and $values.networkPolicy.enabled (not (include "diffleet.redisPeers" .root | trim)) -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" (printf "redis.host %s is outside the cluster, and a network policy cannot name a host: list its addresses in redis.networkPolicy.cidrs, or set networkPolicy.enabled=false." (include "diffleet.redisHosts" .root | fromJsonArray | join ", "))) -}}
{{- end -}}
{{- if and (eq $redis.kind "server") $redis.addresses -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" "redis.addresses is for sentinels and Clusters: set redis.kind, or name the server in redis.host.") -}}
{{- end -}}
{{- if ne $redis.kind "server" -}}
{{- if not $redis.addresses -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" (printf "redis.kind is %s: list some host:port in redis.addresses." $redis.kind)) -}}
{{- end -}}
{{- if $redis.host -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" (printf "redis.kind is %s, which redis.addresses name: leave redis.host empty." $redis.kind)) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $redis.kind "sentinel") $redis.tls.enabled -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" "redis.tls.enabled is true, but through sentinels there is no TLS: use a service that follows the primary, or a Cluster.") -}}
{{- end -}}
{{- if and (eq $redis.kind "cluster") (ne (int $redis.db) 0) -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" (printf "redis.db is %d; a Cluster has no database but 0." (int $redis.db))) -}}
{{- end -}}
{{- if and (eq $redis.kind "cluster") $values.jobs.enabled (not (get $values.jobs.settings "jobs_redis_url")) -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" "the jobs' own queue cannot be in a Cluster: name a server in jobs.settings.jobs_redis_url.") -}}
{{- end -}}
{{- if and $redis.tls.caSecret (not $redis.tls.enabled) -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" "redis.tls.caSecret is set, but redis.tls.enabled is false: enable TLS, or remove the certificate.") -}}
{{- end -}}
{{- if not $redis.auth.existingSecret -}}
{{- range $role, $key := $redis.auth.usernameKeys -}}
{{- if $key -}}
{{- include "diffleet.fault" (dict "faults" $.faults "text" (printf "redis.auth.usernameKeys.%s is set, but redis.auth.existingSecret is empty: name the Secret that holds it." $role)) -}}
{{- end -}}
{{- end -}}
{{- else -}}
{{- range $role, $key := $redis.auth.passwordKeys -}}
{{- if not $key -}}
{{- include "diffleet.fault" (dict "faults" $.faults "text" (printf "redis.auth.passwordKeys.%s is empty: name the key of the password in Secret %s." $role $redis.auth.existingSecret)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "diffleet.validateApi" -}}
{{- $api := .root.Values.api -}}
{{- $need := add $api.drain.delaySeconds $api.drain.seconds 15 -}}
{{- if lt (int64 $api.terminationGracePeriodSeconds) $need -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" (printf "api.terminationGracePeriodSeconds is %d; draining takes api.drain.delaySeconds + api.drain.seconds + 15 s = %d." (int $api.terminationGracePeriodSeconds) (int $need))) -}}
{{- end -}}
{{- if and $api.autoscaling.enabled (gt (int $api.autoscaling.minReplicas) (int $api.autoscaling.maxReplicas)) -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" (printf "api.autoscaling.minReplicas %d is over maxReplicas %d." (int $api.autoscaling.minReplicas) (int $api.autoscaling.maxReplicas))) -}}
{{- end -}}
{{- $least := $api.autoscaling.enabled | ternary $api.autoscaling.minReplicas $api.replicas -}}
{{- include "diffleet.validateDisruption" (dict "faults" .faults "where" "api" "of" $api "least" $least) -}}
{{- include "diffleet.validateRollout" (dict "faults" .faults "where" "api" "of" $api) -}}
{{- if and $api.ingress.enabled (not $api.ingress.hosts) -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" "api.ingress.enabled needs api.ingress.hosts: without a host the rule would take all traffic of the controller.") -}}
{{- end -}}
{{- if and $api.gateway.enabled (not $api.gateway.parentRefs) -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" "api.gateway.enabled needs api.gateway.parentRefs: name the Gateway.") -}}
{{- end -}}
{{- if $api.gateway.enabled -}}
{{- include "diffleet.validateApiGroup" (dict "root" .root "faults" .faults "group" "gateway.networking.k8s.io/v1" "value" "api.gateway.enabled" "what" "the Gateway API") -}}
{{- end -}}
{{- end -}}

{{- define "diffleet.validateJobs" -}}
{{- with .root.Values -}}
{{- if and .api.webhooks.existingSecret (not .jobs.enabled) -}}
{{- include "diffleet.fault" (dict "faults" $.faults "text" "api.webhooks.existingSecret is set, but jobs.enabled is false: the jobs deliver webhooks. Enable them, or remove the Secret.") -}}
{{- end -}}
{{- if and .api.webhooks.existingSecret .networkPolicy.enabled (not .jobs.egress) -}}
{{- include "diffleet.fault" (dict "faults" $.faults "text" "webhooks leave the pods of the jobs, and a network policy holds them back: list in jobs.egress where they may go, or set networkPolicy.enabled=false.") -}}
{{- end -}}
{{- end -}}
{{- with .root.Values.jobs -}}
{{- $need := add .drain.seconds 15 -}}
{{- if and .enabled (lt (int64 .terminationGracePeriodSeconds) $need) -}}
{{- include "diffleet.fault" (dict "faults" $.faults "text" (printf "jobs.terminationGracePeriodSeconds is %d; draining takes jobs.drain.seconds + 15 s = %d." (int .terminationGracePeriodSeconds) (int $need))) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "diffleet.validateShared" -}}
{{- $values := .root.Values -}}
{{- with $values.modelStore -}}
{{- if and .claimName .hostPath -}}
{{- include "diffleet.fault" (dict "faults" $.faults "text" "modelStore.claimName and modelStore.hostPath exclude each other: name one volume.") -}}
{{- end -}}
{{- if and .path (not .claimName) (not .hostPath) -}}
{{- include "diffleet.fault" (dict "faults" $.faults "text" (printf "modelStore.path is %s, but there is no volume: set modelStore.claimName or modelStore.hostPath." .path)) -}}
{{- end -}}
{{- end -}}
{{- include "diffleet.validateLabels" (dict "faults" .faults "where" "commonLabels" "labels" $values.commonLabels) -}}
{{- include "diffleet.validateLabels" (dict "faults" .faults "where" "podDefaults.labels" "labels" $values.podDefaults.labels) -}}
{{- range $name := list "serviceMonitor" "podMonitor" "rules" -}}
{{- if (get $values.monitoring $name).enabled -}}
{{- include "diffleet.validateApiGroup" (dict "root" $.root "faults" $.faults "group" "monitoring.coreos.com/v1" "value" (printf "monitoring.%s.enabled" $name) "what" "the Prometheus operator") -}}
{{- end -}}
{{- end -}}
{{- if not $values.podDefaults.serviceAccount.create -}}
{{- if not $values.podDefaults.serviceAccount.existingName -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" "podDefaults.serviceAccount.create is false: name one in podDefaults.serviceAccount.existingName.") -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "diffleet.validatePools" -}}
{{- $names := dict -}}
{{- $models := dict -}}
{{- range $key, $pool := include "diffleet.pools" .root | fromJson -}}
{{- $where := printf "pools.%s" $key -}}
{{- include "diffleet.validatePool" (dict "root" $.root "faults" $.faults "where" $where "pool" $pool) -}}
{{- $object := include "diffleet.object" (dict "root" $.root "suffix" (printf "worker-%s" $key)) -}}
{{- if hasKey $names $object -}}
{{- include "diffleet.fault" (dict "faults" $.faults "text" (printf "%s and pools.%s both become %s: rename one." $where (get $names $object) $object)) -}}
{{- end -}}
{{- $_ := set $names $object $key -}}
{{- with $pool.model.name -}}
{{- if hasKey $models . -}}
{{- include "diffleet.fault" (dict "faults" $.faults "text" (printf "%s and pools.%s both serve the model %q: they would read one queue and scale on it twice. Give one pool more replicas, or the models different names." $where (get $models .) .)) -}}
{{- end -}}
{{- $_ := set $models . $key -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "diffleet.validatePool" -}}
{{- $where := .where -}}
{{- $pool := .pool -}}
{{- $faults := .faults -}}
{{- if not $pool.model.name -}}
{{- include "diffleet.fault" (dict "faults" $faults "text" (printf "%s.model.name is empty: it is what requests ask for." $where)) -}}
{{- end -}}
{{- include "diffleet.validateModel" . -}}
{{- $need := add $pool.drain.seconds 15 -}}
{{- if lt (int64 $pool.terminationGracePeriodSeconds) $need -}}
{{- include "diffleet.fault" (dict "faults" $faults "text" (printf "%s.terminationGracePeriodSeconds is %d; draining takes drain.seconds + 15 s = %d." $where (int $pool.terminationGracePeriodSeconds) (int $need))) -}}
{{- end -}}
{{- $least := $pool.scaling.enabled | ternary $pool.scaling.min $pool.replicas -}}
{{- include "diffleet.validateDisruption" (dict "faults" $faults "where" $where "of" $pool "least" $least) -}}
{{- include "diffleet.validateRollout" (dict "faults" $faults "where" $where "of" $pool) -}}
{{- include "diffleet.validateLabels" (dict "faults" $faults "where" (printf "%s.podLabels" $where) "labels" $pool.podLabels) -}}
{{- if $pool.scaling.enabled -}}
{{- include "diffleet.validateScaling" . -}}
{{- end -}}
{{- if and (hasKey $pool.settings "num_pages") (hasKey $pool.settings "kv_cache_mb") -}}
{{- include "diffleet.fault" (dict "faults" $faults "text" (printf "%s.settings: num_pages and kv_cache_mb exclude each other." $where)) -}}
{{- end -}}
{{- end -}}

{{- define "diffleet.validateModel" -}}
{{- $model := .pool.model -}}
{{- $missing := "" -}}
{{- if and (eq $model.source "pvc") (not $model.pvc.claimName) -}}{{- $missing = "pvc.claimName" -}}
{{- else if and (eq $model.source "image") (not $model.image.reference) -}}{{- $missing = "image.reference" -}}
{{- else if and (eq $model.source "hostPath") (not $model.hostPath) -}}{{- $missing = "hostPath" -}}
{{- else if and (eq $model.source "init") (not $model.init.image) -}}{{- $missing = "init.image" -}}
{{- end -}}
{{- with $missing -}}
{{- include "diffleet.fault" (dict "faults" $.faults "text" (printf "%s.model.source is %s: set model.%s." $.where $model.source .)) -}}
{{- end -}}
{{- if and (eq $model.source "image") (semverCompare "<1.33.0-0" .root.Capabilities.KubeVersion.Version) -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" (printf "%s.model.source image needs Kubernetes >= 1.33, this is %s: use pvc or init." .where .root.Capabilities.KubeVersion.Version)) -}}
{{- end -}}
{{- $ceiling := include "diffleet.ceiling" .pool | int -}}
{{- if and (eq $model.source "pvc") (hasPrefix "ReadWriteOnce" $model.pvc.accessMode) (gt $ceiling 1) -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" (printf "%s may have %d workers, but its claim %s is %s: a second pod on another node would never start. Use a ReadOnlyMany claim, an image or an init container." .where $ceiling $model.pvc.claimName $model.pvc.accessMode)) -}}
{{- end -}}
{{- if and (eq .pool.compileCache.type "pvc") (not .pool.compileCache.claimName) -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" (printf "%s.compileCache.type is pvc: set compileCache.claimName." .where)) -}}
{{- end -}}
{{- end -}}

{{- define "diffleet.validateScaling" -}}
{{- $scaling := .pool.scaling -}}
{{- $budget := int .pool.startup.budgetSeconds -}}
{{- include "diffleet.validateApiGroup" (dict "root" .root "faults" .faults "group" "keda.sh/v1alpha1" "value" (printf "%s.scaling.enabled" .where) "what" "KEDA") -}}
{{- if gt (int $scaling.min) (int $scaling.max) -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" (printf "%s.scaling.min %d is over max %d." .where (int $scaling.min) (int $scaling.max))) -}}
{{- end -}}
{{- if gt (int $scaling.fallback.replicas) (int $scaling.max) -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" (printf "%s.scaling.fallback.replicas %d is over max %d." .where (int $scaling.fallback.replicas) (int $scaling.max))) -}}
{{- end -}}
{{- range $name := list "cooldownPeriod" "initialCooldownPeriod" -}}
{{- if lt (int (get $scaling $name)) $budget -}}
{{- include "diffleet.fault" (dict "faults" $.faults "text" (printf "%s.scaling.%s is %d s, the start budget %d s: a worker would be taken away while it loads. Raise it, or lower startup.budgetSeconds." $.where $name (int (get $scaling $name)) $budget)) -}}
{{- end -}}
{{- end -}}
{{- if and (gt (int .pool.gpu.count) 0) (lt (int $scaling.scaleDown.windowSeconds) 300) -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" (printf "%s.scaling.scaleDown.windowSeconds is %d; a GPU pool needs 300 at least, or it flaps between bursts." .where (int $scaling.scaleDown.windowSeconds))) -}}
{{- end -}}
{{- if and $scaling.prometheus.enabled (not $scaling.prometheus.serverAddress) -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" (printf "%s.scaling.prometheus.enabled needs scaling.prometheus.serverAddress." .where)) -}}
{{- end -}}
{{- end -}}

{{/* Takes (dict "faults" "where" "of" "least"). */}}
{{- define "diffleet.validateDisruption" -}}
{{- $pdb := .of.pdb -}}
{{- if $pdb.enabled -}}
{{- $max := kindIs "invalid" $pdb.maxUnavailable -}}
{{- $min := kindIs "invalid" $pdb.minAvailable -}}
{{- if and (not $max) (not $min) -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" (printf "%s.pdb has maxUnavailable and minAvailable: set one of them to null." .where)) -}}
{{- else if and $max $min -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" (printf "%s.pdb has neither maxUnavailable nor minAvailable: set one, or pdb.enabled=false." .where)) -}}
{{- else if and (not $min) (not (kindIs "string" $pdb.minAvailable)) (ge (int $pdb.minAvailable) (int .least)) -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" (printf "%s.pdb.minAvailable %d with %d pods at least: no node could ever be drained. Use maxUnavailable." .where (int $pdb.minAvailable) (int .least))) -}}
{{- else if and (not $min) (eq (toString $pdb.minAvailable) "100%") -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" (printf "%s.pdb.minAvailable 100%%: no node could ever be drained. Use maxUnavailable." .where)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Takes (dict "faults" "where" "of"). */}}
{{- define "diffleet.validateRollout" -}}
{{- with .of.rollout -}}
{{- if and (eq (int .maxSurge) 0) (eq (int .maxUnavailable) 0) -}}
{{- include "diffleet.fault" (dict "faults" $.faults "text" (printf "%s.rollout has maxSurge 0 and maxUnavailable 0: no rollout could ever start." $.where)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Takes (dict "faults" "where" "labels"). */}}
{{- define "diffleet.validateLabels" -}}
{{- range $key, $value := .labels -}}
{{- if or (hasPrefix "app.kubernetes.io/" $key) (hasPrefix "diffleet/" $key) (eq $key "helm.sh/chart") -}}
{{- include "diffleet.fault" (dict "faults" $.faults "text" (printf "%s: the label %s belongs to the chart." $.where $key)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Takes (dict "root" "faults" "group" "value" "what"). */}}
{{- define "diffleet.validateApiGroup" -}}
{{- if and .root.Values.checkApis (not (.root.Capabilities.APIVersions.Has .group)) -}}
{{- include "diffleet.fault" (dict "faults" .faults "text" (printf "%s needs %s, but the cluster has no %s: install it first. Renders without a cluster: --api-versions %s, or checkApis=false." .value .what .group .group)) -}}
{{- end -}}
{{- end -}}
