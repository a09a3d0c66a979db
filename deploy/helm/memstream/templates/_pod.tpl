{{- /* The pod of both modes. */}}

{{- define "memstream.pod" -}}
metadata:
  labels: {{- include "memstream.labels" . | nindent 4 }}
  {{- with .Values.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "memstream.name" . }}
  automountServiceAccountToken: false
  {{- with .Values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  enableServiceLinks: false # MEMSTREAM_SERVICE_HOST and the like would be taken for settings
  terminationGracePeriodSeconds: {{ add .Values.drain.preStopSeconds .Values.drain.graceSeconds .Values.drain.restSeconds }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: RuntimeDefault
  containers:
    - name: server
      image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args: [serve]
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
      env: {{- include "memstream.env" . | nindent 8 }}
      ports:
        - name: grpc
          containerPort: 7700
        {{- if .Values.http.enabled }}
        - name: http
          containerPort: 7701
        {{- end }}
        - name: metrics
          containerPort: {{ .Values.metrics.port }}
      {{- /* Of the metrics port: it needs no TLS and no client certificate. */}}
      startupProbe:
        httpGet: {path: /readyz, port: metrics}
        periodSeconds: 2
        timeoutSeconds: 3
        failureThreshold: 150
      readinessProbe:
        httpGet: {path: /readyz, port: metrics}
        periodSeconds: 2
        timeoutSeconds: 3
        failureThreshold: 2
      livenessProbe:
        httpGet: {path: /livez, port: metrics}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      lifecycle:
        preStop:
          sleep:
            seconds: {{ .Values.drain.preStopSeconds }}
      resources: {{- toYaml .Values.resources | nindent 8 }}
      volumeMounts:
        - {name: data, mountPath: /data}
        - {name: tmp, mountPath: /tmp}
        {{- if include "memstream.sources" . }}
        - {name: files, mountPath: /etc/memstream, readOnly: true}
        {{- end }}
        {{- with .Values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- if eq .Values.mode "replicated" }}
    - name: data
      emptyDir: {sizeLimit: {{ .Values.data.sizeLimit }}}
    {{- else if .Values.persistence.existingClaim }}
    - name: data
      persistentVolumeClaim: {claimName: {{ .Values.persistence.existingClaim }}}
    {{- end }}
    - name: tmp
      emptyDir: {medium: Memory, sizeLimit: 64Mi}
    {{- with include "memstream.sources" . }}
    - name: files
      projected:
        defaultMode: 0440
        sources: {{- . | nindent 10 }}
    {{- end }}
    {{- with .Values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- if eq .Values.mode "replicated" }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels: {{- include "memstream.selector" . | nindent 10 }}
  {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{- define "memstream.env" -}}
{{- $any := ternary "[::]" "0.0.0.0" .Values.ipv6 }}
{{- $settings := merge (dict) .Values.settings (dict "log_format" "json") -}}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{ include "memstream.variable" (list "listen" (printf "%s:7700" $any)) }}
{{ include "memstream.variable" (list "metrics_listen" (printf "%s:%d" $any (int .Values.metrics.port))) }}
{{- /* Below the mount point, which belongs to root and may have a lost+found. */}}
{{ include "memstream.variable" (list "data_dir" "/data/memstream") }}
{{ include "memstream.variable" (list "drain_grace_s" .Values.drain.graceSeconds) }}
{{- if .Values.insecureListen }}
{{ include "memstream.variable" (list "insecure_listen" true) }}
{{- end }}
{{- include "memstream.httpEnv" (list . $any) }}
{{- include "memstream.storesEnv" . }}
{{- include "memstream.tlsEnv" . }}
{{- include "memstream.accessEnv" . }}
{{- range $name, $value := $settings }}
{{ include "memstream.variable" (list $name $value) }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "memstream.httpEnv" -}}
{{- $http := (index . 0).Values.http }}
{{- if $http.enabled }}
{{- $host := include "memstream.host" (index . 0) }}
{{- $hosts := concat (list $host (printf "%s.cluster.local" $host) (trimSuffix ".svc" $host) (include "memstream.name" (index . 0))) $http.hosts }}
{{- $origins := $http.corsOrigins }}
{{- if $http.ingress.enabled }}
{{- $hosts = append $hosts $http.ingress.host }}
{{- /* The server sees the controller's scheme, not the page's. */}}
{{- $origins = append $origins (printf "%s://%s" (ternary "https" "http" (not (empty $http.ingress.tlsSecret))) $http.ingress.host) }}
{{- end }}
{{ include "memstream.variable" (list "http_listen" (printf "%s:7701" (index . 1))) }}
{{ include "memstream.variable" (list "http_hosts" (join "," $hosts)) }}
{{- with $origins }}
{{ include "memstream.variable" (list "http_cors_origins" (join "," .)) }}
{{- end }}
{{ include "memstream.variable" (list "console" $http.console) }}
{{- else }}
{{ include "memstream.variable" (list "http_listen" "") }}
{{- end }}
{{- end }}

{{- define "memstream.storesEnv" -}}
{{- $stores := include "memstream.storesSecret" . }}
{{- if or .Values.journal.url .Values.journal.existingSecret }}
{{ include "memstream.secretVariable" (list "journal_url" (.Values.journal.existingSecret | default $stores) .Values.journal.key) }}
{{- end }}
{{- if .Values.milvus.uri }}
{{ include "memstream.variable" (list "milvus_uri" .Values.milvus.uri) }}
{{- end }}
{{- if or .Values.milvus.token .Values.milvus.existingSecret }}
{{ include "memstream.secretVariable" (list "milvus_token" (.Values.milvus.existingSecret | default $stores) .Values.milvus.key) }}
{{- end }}
{{- if eq .Values.mode "replicated" }}
- name: MEMSTREAM_ADVERTISE
  value: {{ ternary "[$(POD_IP)]:7700" "$(POD_IP):7700" .Values.ipv6 | quote }}
{{- end }}
{{- end }}

{{- define "memstream.tlsEnv" -}}
{{- if .Values.tls.enabled }}
{{ include "memstream.variable" (list "tls_cert_file" "/etc/memstream/tls.crt") }}
{{ include "memstream.variable" (list "tls_key_file" "/etc/memstream/tls.key") }}
{{- if include "memstream.given" .Values.tls.clientCA }}
{{ include "memstream.variable" (list "tls_client_ca_file" "/etc/memstream/client-ca.crt") }}
{{- end }}
{{- if eq .Values.mode "replicated" }}
{{ include "memstream.variable" (list "tls_peer_ca_file" "/etc/memstream/peer-ca.crt") }}
{{ include "memstream.variable" (list "tls_peer_name" (.Values.tls.peerName | default (include "memstream.host" .))) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "memstream.accessEnv" -}}
{{- $access := .Values.access }}
{{- if $access.enabled }}
{{ include "memstream.variable" (list "access_policy_file" "/etc/memstream/policy.toml") }}
{{- if $access.apiKeys.enabled }}
{{ include "memstream.variable" (list "api_keys_file" "/etc/memstream/keys.json") }}
{{- end }}
{{- if include "memstream.hasJwks" . }}
{{ include "memstream.variable" (list "jwt_issuer" $access.jwt.issuer) }}
{{ include "memstream.variable" (list "jwt_audience" $access.jwt.audience) }}
{{ include "memstream.variable" (list "jwt_jwks" ($access.jwt.jwks.url | default "/etc/memstream/jwks.json")) }}
{{- end }}
{{- if $access.trustedProxies }}
{{ include "memstream.variable" (list "trusted_proxies" (join "," $access.trustedProxies)) }}
{{- end }}
{{- if include "memstream.sharesDatabase" . }}
{{ include "memstream.secretVariable" (list "peer_secret" (.Values.peerSecret.existingSecret | default (include "memstream.accessSecret" .)) .Values.peerSecret.key) }}
{{- end }}
{{- end }}
{{- end }}
